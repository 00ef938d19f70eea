"""Pure tensor functions: no Module, no stored state. What moves comes back as a return value."""
