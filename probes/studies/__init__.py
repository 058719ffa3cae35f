"""What the commands do: several models or places, resumable, with results, figure and table in one folder."""
