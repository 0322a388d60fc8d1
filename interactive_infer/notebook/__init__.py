"""The only folder that knows IPython, ipykernel and ipywidgets. Loaded when something is first displayed."""
