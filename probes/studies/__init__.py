"""What the commands do: several models or places, resumable, with results, figure and table in one folder.

A study is what a command does, declared for `runner.run`: of profiles (`study`), of one probe (`survey`), of toys beside a
model (`match`). The map (`map`) has places and `reading` a text instead of models; their units are kept in the same way.
"""
