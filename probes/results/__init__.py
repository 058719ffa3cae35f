"""Labelled results in files, and what is computed from them: profiles, intervals, verdicts of toys."""
