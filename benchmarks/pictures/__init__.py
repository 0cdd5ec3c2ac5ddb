"""Pictures of the README and the documentation, drawn from recorded figures and real plans."""
