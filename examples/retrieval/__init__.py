"""A trainer for image-text retrieval: VSE-style encoders, GPO pooling, any itrloss loss."""
