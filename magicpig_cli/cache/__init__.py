"""Host store of K/V rows, tables, device window: one sequence's memory."""
