"""Process of the submitted job: checks the job, connects to Ray, starts schedulers, and exports the model."""
