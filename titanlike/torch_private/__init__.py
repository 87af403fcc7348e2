"""Every private API of torch that titanlike uses, and every workaround, a file a concern of torch.

A workaround names its symptom and the test in `tests/torch_private` that fails on the version of
torch that no longer needs it. Imports torch alone.
"""
