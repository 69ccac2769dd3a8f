"""Every part of Spark that not all sessions have: the JVM, which Spark Connect hides, and what older versions lack.

`capabilities.py` names what a session may be unable to do, and says once what takes its place.
"""
