"""What commands share to show results: one palette, plots, tables, HTML pages."""
