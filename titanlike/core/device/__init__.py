"""The only package that knows which devices exist: CPU, CUDA, ROCm (torch calls it cuda), XPU, or
another torch accelerator. All other packages use a device by these functions."""
