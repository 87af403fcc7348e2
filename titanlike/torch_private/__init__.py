"""Every private API of torch that titanlike uses, and the workarounds, a file a concern of torch.

Each names its symptom; `tests/torch_private` fails on the version of torch that no longer needs it.
Imports torch alone.
"""

from titanlike.torch_private.deferred_dynamo import defer_dynamo

defer_dynamo()  # before anything of torch has imported it
