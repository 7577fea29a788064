"""Plug-ins for engines; each is imported by whoever uses that engine, and needs the extra of its name."""
