"""Reports: text, HTML, plots, live progress, plans for gradient accumulation, and the linear fit."""
