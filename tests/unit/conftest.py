from megavlm.backend import activate

activate()  # before any test module imports megatron-core
