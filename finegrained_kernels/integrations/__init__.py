"""Plug-ins for engines. Each needs the extra that has its name; import the one for the engine that you use."""
