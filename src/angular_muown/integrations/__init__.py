"""Adapters for host frameworks, one module each. The core never imports them."""
