"""Optional ideas, one file each. The core imports one only when an option or request needs it."""
