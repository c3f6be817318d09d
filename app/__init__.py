"""The page: knows Gradio and Plotly, and no tensor."""
