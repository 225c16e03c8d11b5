"""What an answer is made of: reasoning, content and tool calls, in the formats of the model families.

Parsers take text as it comes, in any cut, and give typed parts; `detect` says which one a chat template calls
for, `generic` shows tools to a model whose template has no place for them, `forcing` makes a model call.
"""
