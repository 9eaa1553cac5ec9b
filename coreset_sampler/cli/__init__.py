"""The command line: options, and a call of the library for each command."""
