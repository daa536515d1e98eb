"""Write the folder of a run: `rlhf init`.

`presets` copies a folder of configs/, and `fit_preset` changes it if it does not fit a GPU. `preferences` makes a
folder from pairs: `pairs` reads them, `limits` drops those that do not fit, `parts` splits them over the stages,
`sizes` measures the model and chooses batches and steps, `templates` writes the YAMLs. Both add `baselines`.
`next_round` makes one from a finished run and its labels. All write through `folder`.
"""
