"""Models on the Hugging Face Hub: fetched into its usual cache, verified, pinned, removed. Knows nothing of MLX.

`names` reads ids, `listing` asks the Hub what there is, `transfer` fetches one file, `pull` a whole model, `cache`
knows where things lie, `pins` which commit a name stands for. The Hub's client is imported only where it is used.
"""
