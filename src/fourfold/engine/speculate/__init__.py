"""Guessing the tokens that come next, so that one step computes several of them. An answer is the same with
and without: a guess is kept only if it is the very token that the step draws there."""
