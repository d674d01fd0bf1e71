"""Pages that open offline: one file each that loads nothing and runs nothing but its own script.

document.py      a whole HTML file: style, script and data inside, and the policy that lets nothing else run
job_page.py      a job; fleet_page.py: many jobs
style.css, charts.js, job.js, fleet.js
"""
