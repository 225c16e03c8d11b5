"""From a constraint on an answer (schema, regex, grammar, choice) to token masks and forced tokens.

`sources` turns what a user sends into a Constraint and says what is wrong with it; `compile` turns a
Constraint into a Guide per sequence. Importing the package or `guide` does not import llguidance:
that takes a while.
"""
