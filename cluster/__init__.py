"""Processes and devices: the live half. Never imports matplotlib or ipywidgets."""
