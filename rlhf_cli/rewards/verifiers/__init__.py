"""Verifiers: built-in rewards that compare a response with a column of its row, such as the right answer.

Each module of this package is one verifier, a function with the module's name (see rewards/builtin.py). A row whose
column is missing or null has no score. rewards/answers.py has what they share.
"""
