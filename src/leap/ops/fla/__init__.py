"""The backend fla: kernels of flash-linear-attention, where it is installed, under our maps."""
