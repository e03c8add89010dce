"""What people see: console, progress, tables."""
