"""The Docker Engine through its SDK: containers, images, and what of ours is left behind."""
