"""Tables, figures and files that a person or a program reads."""
