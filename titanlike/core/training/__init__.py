"""The training job: decide (train_plan), allocate (build), train (loop, step), check each step (anomalies).

May import all packages below it: checkpoint, pipeline, models, optim, graph, data,
launch, metrics, config and torch_private.
"""
