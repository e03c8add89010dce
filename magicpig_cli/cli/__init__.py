"""Typer commands: parse, call the engine, render."""
