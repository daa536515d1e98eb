"""A PPO update as a textbook would compute it: loops over rows, in float64, each formula with its source.

`update.py` reads as the algorithm; the other modules are its chapters: sampling, outputs, scores, advantages, losses,
optimization and metrics. They are written from the papers and the options' help texts, and share only the settings and
the random seeds with rlhf_cli/ppo: no padding, masks, micro-batches, caches or torch optimizer. They rely on autograd
and the models' own forward(). `comparison.py` runs the trainer beside them.

examples/ppo_loop.py has the default options alone, and imports nothing from here, so that it can be read and copied as
one file. Where it has a recursion, as for advantages, a sum stands here: the trainer is held to both forms.

A row is an episode: a prompt and a response, lists of token ids. T is the number of its response tokens, V the size of
the vocabulary. Logarithms are natural, KL is in nats. Tensors are on the CPU.
"""
