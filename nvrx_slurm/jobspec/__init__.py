"""What a job is: job.yaml and the layers above and below it, merged once into a frozen `JobSpec`.

    model.py        the keys, their defaults and relations; fault_tolerance.py those of that block, attribution.py and
                    progress.py those of blocks in it
    block.py        what every mapping of job.yaml is
    values.py       what each kind of value accepts
    load.py         read, merge, validate: flag > environment > job.yaml > site file > default
    layers.py       one of these, and where each key of it stands
    flags.py        the flags that have a name of their own
    older_names.py  keys and flags of older releases, read as the new ones
    yamlfile.py     YAML with the line of every key
    complaints.py   validation errors as sentences that name file, line and key
    sizes.py        `2GiB`, `500MB`
    allowances.py   `3`, `10 per 24h`
    urls.py         URLs of services, without credentials
    budgets.py      how a teardown fits into the time that Slurm leaves for it
    plan.py         JobSpec → the `Plan` that agents read
    site.py         where the site files and the cache lie
    schema.py       the JSON Schema, and what each key means
    docs.py         writes docs/job-yaml.md
    env.py          the one module that reads the environment
    secret_file.py  files with a password, a token or a key

Import the modules, not this package: agents load `env` and `budgets` only, and pydantic stays out of their way.
"""
