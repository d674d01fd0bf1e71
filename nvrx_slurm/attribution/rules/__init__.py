"""The rules: what a line of a log means for a job that failed (docs/rules.md).

*.yaml       the built-in rules, as data
rulefile     one file of rules: its form, and an error for each way in which it can be wrong
literals     the texts of which one stands in every line that a pattern matches
catalogue    all rules of an analysis: the built-in ones and the user's
"""
