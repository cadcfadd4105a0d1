"""Mutation testing: small faults are planted in the code, one at a time, and the tests must see each."""
