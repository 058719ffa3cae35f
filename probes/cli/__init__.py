"""The command line: commands, their options, progress on the terminal."""
