"""What a first optimiser imports, torch's compiler, imported once and before workers are forked."""

import torch

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1)])
