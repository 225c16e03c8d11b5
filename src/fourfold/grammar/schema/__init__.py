"""JSON Schema: checks, exact rewriting, what a grammar cannot say, and a validator for that part."""
