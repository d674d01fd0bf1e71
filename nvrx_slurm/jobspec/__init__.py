"""What a job is: job.yaml and the layers above and below it, merged once into a frozen `JobSpec`.

    model.py        the keys of job.yaml: type, default, meaning and relations of each
    values.py       what each kind of value accepts: durations, sizes, budgets, commands
    reading.py      plain values → a block of the model, or all complaints about them
    prewarm.py      `prewarm`, and which commands can be started warm
    load.py         read, merge, validate: flag > environment > job.yaml > site file > default; and write
    flags.py        the flags that have a name of their own
    deprecated.py   deprecated keys and flags, translated to the new ones
    yamlfile.py     YAML with the line of every key
    urls.py         URLs of services, without credentials
    budgets.py      how a teardown fits into the time that Slurm leaves for it
    plan.py         JobSpec → the `Plan` that agents read
    site.py         where the site files and the cache lie
    schema.py       the JSON Schema, and what each key means
    docs.py         writes docs/job-yaml.md
    env.py          the one module that reads the environment

Import the modules, not this package: it imports none.
"""
