"""The command angular-lab."""
