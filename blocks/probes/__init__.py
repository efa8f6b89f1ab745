"""Synthetic tasks that show what a mixer can do, and the runner that trains small models on them.

task.py        a task: sizes, schedule, generator, solver
tasks/         one file per task
model.py       the small model of a mixer for a task
trainer.py     one run; on a GPU a whole training step is one CUDA graph
progress.py    cells in progress: learning rates first, then seeds at the best rate
runner.py      cells within a time budget, on the cores of a CPU or side by side on a GPU
records.py     finished runs as JSON lines
report.py      tables, heat map and curves over length
claims.py      claims of papers, and the verdict of runs on them
table.py       the mixers and tasks of the tables of docs/evidence/
pages.py       the pages of docs/evidence/
results/       the runs that ship with the package, which docs/evidence/ shows
"""
