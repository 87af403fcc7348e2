"""The one room that knows what a rank computes on: the CPU, CUDA, ROCm (torch calls it cuda), XPU,
or another accelerator of torch. Everywhere else a device is asked for by these functions."""
