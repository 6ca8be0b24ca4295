"""The parts of `tokenbus demo`: what is asked, what must come of it, and how it is shown."""
