"""GPU memory. Nothing here imports a CUDA library before a device is asked for."""
