"""What a run is: its settings, the named runs, overrides from the command line."""
