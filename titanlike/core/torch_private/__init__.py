"""Every private API of torch that titanlike uses, with workarounds, one file per subject of torch.

Each names its symptom; `tests/torch_private` fails on a torch that no longer needs it. Imports only
torch.
"""

from titanlike.core.torch_private.deferred_dynamo import defer_dynamo

defer_dynamo()  # before any part of torch imports it
