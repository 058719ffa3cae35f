"""Files, resumption, processes, memory and progress; nothing here knows of models."""
