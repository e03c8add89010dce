"""Measuring decode: fills of a wanted length, timed steps, rows of figures. Nothing here prints."""
