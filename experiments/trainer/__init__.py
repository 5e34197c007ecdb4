"""What an adapter, a publication and an idea cost in the trainer: experiments that have their answers."""
