"""Small trainings within a byte budget, each beside the same training without one."""
