"""Configuration of every command."""
