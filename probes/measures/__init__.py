"""One file per measurement, and what several of them share."""
